"""How one model is spread over many processes: topology, parameter records, collectives, parallel layers,
gradient buckets.
"""
