"""The error that a command prints in one line."""


class UserError(ValueError):
    """Something that the user can mend: the message says what is wrong, where, and what to do.

    A command prints it in one line, `error: ...`. All other errors are bugs, and keep their traceback.
    """
