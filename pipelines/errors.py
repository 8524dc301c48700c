"""The one error of this package that is meant for the person who gave the data."""


class DataError(ValueError):
    """Data or data settings that cannot be used; the message is a sentence that says what to do."""
