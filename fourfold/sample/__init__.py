"""What a sample is: its type, samples as columns, and their forms on the wire and on the disk."""

from fourfold.sample.sample import Sample as Sample
from fourfold.sample.sample import ScoreTerm as ScoreTerm
from fourfold.sample.sample import VersionSpan as VersionSpan
from fourfold.sample.sample import check_unique as check_unique
