"""Files that people write by hand: YAML with lines, keys and types checked, mistakes as data, errors on one screen.

What the cluster file, the job file and the policy file share. It knows nothing of what is in them.
"""
