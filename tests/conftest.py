"""For all tests."""

import signal

# Where a shell runs the tests in the background it lets them ignore interrupts, and so would the processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
