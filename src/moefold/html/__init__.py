"""Parts that all HTML pages of moefold share: CSS, document frame, chart scales. Pages load nothing from elsewhere."""
