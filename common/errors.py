"""The error that a user can mend."""


class UserError(ValueError):
    """An error that the user can mend. Its message says what is wrong, where, and what to do.

    A command prints a `UserError` in one line, `error: ...`.
    """
