"""The linter of mesh layouts: jobs, rules, findings, fixes, reports."""

from __future__ import annotations
