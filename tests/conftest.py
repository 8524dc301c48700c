"""For all tests."""

import signal

from hypothesis import settings

# Where a shell runs the tests in the background it lets them ignore interrupts, and so would the processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test fails because the machine is busy.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
