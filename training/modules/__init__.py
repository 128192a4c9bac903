"""What of the model a stage trains, and how these modules compute."""
