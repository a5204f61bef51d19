"""What collectives must and will take, by formula: lower bounds with the cut that binds, bytes on every link."""
