"""Plain data that every layer may use: errors, quantities, layouts, ledgers and records. Loads no torch."""
