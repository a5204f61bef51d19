"""What `ringweave doctor` looks at, and what it makes of it."""
