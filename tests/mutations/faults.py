"""All planted faults: one wrong sign or edge each, and the tests that must turn red by a wrong number."""

from __future__ import annotations

from .fault import Fault
from .faults_attention import ATTENTION
from .faults_divergences import DIVERGENCES
from .faults_loss import LOSS
from .faults_mhc import MHC
from .faults_model import MODEL
from .faults_more_rows import MORE_ROWS
from .faults_remake import REMAKE
from .faults_rows import ROWS

FAULTS: list[Fault] = [*ROWS, *MORE_ROWS, *REMAKE, *LOSS, *DIVERGENCES, *ATTENTION, *MHC, *MODEL]
