"""How tokens look at each other: projections around one attention core."""
