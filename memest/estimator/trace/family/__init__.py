"""Programs at other batch sizes or sequence lengths, made from few traces."""
