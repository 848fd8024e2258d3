"""Models and data sets of the Hugging Face Hub: `hf:OWNER/NAME`, with `@REVISION` if it is not the newest.

`repository.py` finds them in the cache of huggingface_hub, or downloads them; `layout.py` knows which files of a
repository belong to a model, or to a split of a data set; `upload.py` uploads a model folder.
"""

from fourfold.hub.layout import ADDITIONAL_TEMPLATES as ADDITIONAL_TEMPLATES
from fourfold.hub.layout import COMPRESSED as COMPRESSED
from fourfold.hub.layout import choose_split as choose_split
from fourfold.hub.layout import split_files as split_files
from fourfold.hub.repository import PREFIX as PREFIX
from fourfold.hub.repository import NotOnHub as NotOnHub
from fourfold.hub.repository import Repository as Repository
from fourfold.hub.repository import ask as ask
from fourfold.hub.repository import dataset_files as dataset_files
from fourfold.hub.repository import download as download
from fourfold.hub.repository import model_folder as model_folder
from fourfold.hub.repository import pin as pin
from fourfold.hub.repository import select_all as select_all
from fourfold.hub.repository import select_split as select_split
