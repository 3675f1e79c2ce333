"""Messages between clients and server: from modules to payloads, back, and their bytes."""
