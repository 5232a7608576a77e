"""One process or many: adapters whose ranks take every step together, and jobs whose ranks divide the work.

- `joined`, `apart`, `here`: the process group that adapters belong to. Its ranks adapt as one: `Ranks` is how a method
  sums what it computes from a batch over all of them. A process alone is `ALONE`, for which every sum is its own.
- `torchrun_job`: the processes that `torchrun` started, which divide a `Job` between them through a key-value store.

What only a process group needs (`synchronised`, `communicator`, `batchnorm`) is imported where there is one.
"""

from cafe_tta.distributed.job import Job as Job
from cafe_tta.distributed.job import RankLost as RankLost
from cafe_tta.distributed.job import Share as Share
from cafe_tta.distributed.job import torchrun_job as torchrun_job
from cafe_tta.distributed.job import torchrun_share as torchrun_share
from cafe_tta.distributed.ranks import ALONE as ALONE
from cafe_tta.distributed.ranks import Diverged as Diverged
from cafe_tta.distributed.ranks import RankError as RankError
from cafe_tta.distributed.ranks import Ranks as Ranks
from cafe_tta.distributed.ranks import apart as apart
from cafe_tta.distributed.ranks import here as here
from cafe_tta.distributed.ranks import joined as joined
