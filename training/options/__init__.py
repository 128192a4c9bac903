"""What a user may ask for: recipes, their fields, and what is refused."""
