"""Programs at other sizes, made from few traces."""
