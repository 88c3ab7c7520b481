"""What runs steps: eagerly, or captured as graphs."""
