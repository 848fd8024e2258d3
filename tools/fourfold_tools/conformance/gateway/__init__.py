"""Checks that a gateway of agents keeps the contract. No check depends on the model's texts."""

from __future__ import annotations

from typing import Final

from fourfold_tools.conformance.checks import Checks
from fourfold_tools.conformance.gateway.http import HTTP
from fourfold_tools.conformance.gateway.outcomes import OUTCOMES
from fourfold_tools.conformance.gateway.probe import GatewayProbe
from fourfold_tools.conformance.gateway.sessions import SESSIONS
from fourfold_tools.conformance.gateway.turns import TURNS

CHECKS: Final = Checks(TURNS, SESSIONS, OUTCOMES, HTTP)

__all__ = ["CHECKS", "GatewayProbe"]
