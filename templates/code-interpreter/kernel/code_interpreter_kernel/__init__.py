"""The Python kernel of the code interpreter: that of Jupyter, with variables per call, results as clients read them, and output
that waits for its reader."""
