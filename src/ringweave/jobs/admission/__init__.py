"""May this be, and may they: name, permission, policy and split, in this order."""
