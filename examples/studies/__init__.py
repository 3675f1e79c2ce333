"""Studies: settings, methods and seeds that make the tables and figures of the documentation."""
