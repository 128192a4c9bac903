"""What every package uses: the error for a user, how commands run, files, and records."""
