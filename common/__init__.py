"""What every package uses: the error for a user, commands, files, and records that are read back."""
