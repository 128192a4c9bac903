"""Commands that compose a NormLlava and train it in two stages with TRL; the rooms hold what they need."""
