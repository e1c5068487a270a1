"""Pages over the results: pure figure builders, page models, templates."""
