"""How the bundled models and the toys of the tests were trained."""
