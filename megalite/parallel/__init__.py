"""How one model is spread over many processes: groups, collectives, parallel layers, gradient buckets."""
