"""Models without a download: published shapes, random weights, a known acceptance rate."""
