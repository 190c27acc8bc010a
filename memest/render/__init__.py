"""Reports as text, tables, JSON lines and pages."""
