"""Tests of the runner, with nothing but the standard library: the step `lint` runs them."""
