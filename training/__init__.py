"""Commands that compose a model and train it in two stages with TRL; the rooms hold what they need."""
