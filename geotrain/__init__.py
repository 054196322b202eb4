"""geotrain: train one PyTorch model across many odd machines and slow links."""
