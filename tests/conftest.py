"""For all tests: Ctrl-C means what it means in a terminal.

A shell starts a background job with SIGINT ignored, and whatever that job starts inherits it; a test that
interrupts a process would then wait for ever.
"""

import signal

import pytest
from hypothesis import strategies as st

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def hypothesis_is_whole() -> None:
    """Hypothesis imports this strategy's module at its first use. Parsed in the middle of a test, beside whatever the
    garbage collector ends just then, CPython 3.11 now and then fails: "AST constructor recursion depth mismatch"."""
    st.randoms().validate()
