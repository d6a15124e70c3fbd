"""How many units every site keeps (METHODS §10)."""
