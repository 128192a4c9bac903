"""What every package uses: the error that a user can mend, commands, files and records."""
