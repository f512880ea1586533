"""Check rows against what was sampled, whichever trainer they are for."""

from torchrl_mt.audit.audit import audit_rows
from torchrl_mt.audit.report import AuditReport, Finding, Place

__all__ = ["AuditReport", "Finding", "Place", "audit_rows"]
