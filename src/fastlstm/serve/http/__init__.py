"""HTTP: connections, requests, keys, errors."""
