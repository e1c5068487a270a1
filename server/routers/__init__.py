"""One file a group of calls; each has ``create(context) -> APIRouter``."""
