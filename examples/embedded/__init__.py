"""Tasks of the studies with the data of `fedprompt.samples`, and networks with random weights."""
