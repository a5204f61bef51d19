"""Speaking to an API server: where it is and who we are, requests, failures, names of resources."""
