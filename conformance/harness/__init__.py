"""What the suites share: the platform under test, the state of the host around it, and small clients."""
