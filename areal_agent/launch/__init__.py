"""Local processes that cannot outlive the one that started them."""
