"""What other libraries need to work with this package's models."""
