"""In-engine agent: runs inside vLLM processes, with nothing beyond what vLLM itself brings."""
