"""For all tests: Ctrl-C means what it means in a terminal.

A shell starts a background job with SIGINT ignored, and whatever that job starts inherits it; a test that
interrupts a process would then wait for ever.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
