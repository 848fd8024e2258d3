"""Checks that a gateway of agents keeps the contract. No check depends on what the model says."""

from __future__ import annotations

from typing import Final

from fourfold.conformance.checks import Checks
from fourfold.conformance.gateway.http import HTTP
from fourfold.conformance.gateway.outcomes import OUTCOMES
from fourfold.conformance.gateway.probe import GatewayProbe
from fourfold.conformance.gateway.sessions import SESSIONS
from fourfold.conformance.gateway.turns import TURNS

CHECKS: Final = Checks(TURNS, SESSIONS, OUTCOMES, HTTP)

__all__ = ["CHECKS", "GatewayProbe"]
