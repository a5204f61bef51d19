"""What is checked of objects and of those who ask: schemas, rules in CEL, admission policies, roles."""
