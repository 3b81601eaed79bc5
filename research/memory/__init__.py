r"""Decides in a real language model whether a group's deviation costs accuracy.

docs/objective.md derives that AnySearch, which divides by the deviation of a
group, trusts a memory as soon as it is right in a share p > q / (1 + q) of the
questions, for searches that find with probability q. So it should lose accuracy
there and none below. A small model remembers too little for that, so memories
of known reliability are put in: the form of a question tells which (`memories`,
who .2, when .5, where .8). Losses are predicted before any training.

Both forms begin alike; `$C` is a configuration of the product:

    C="--config=research/memory/configuration.py:cpu --config.policy=MODEL
       --config.retrieval.index=INDEX --config.data.path=QUESTIONS"
    anysearch demonstrate $C --budgets=1..4 --output=R/chains/train
    anysearch demonstrate $C --budgets=1..4 --questions=QUESTIONS \
        --output=R/chains/test
    python -m research.memory.memories --trained=R/chains/train \
        --evaluated=R/chains/test --output=R
    anysearch prepare_data --folder=R/questions --sets=all --mix=memory \
        --output=R/prepared
    C="$C --config.data.path=R/prepared"
    anysearch sft $C --config.evaluation.datasets=other \
        --config.sft.steps=1000 --demonstrations=R/memory --output=R/closed_book
    anysearch sft $C --config.evaluation.datasets=other \
        --config.policy=R/closed_book/policy \
        --demonstrations=R/warm,R/memory --output=R/warm_start
    export MEMORY_POLICY=R/warm_start/policy
    for split in train test; do
      anysearch evaluate $C --scripted=research/memory/forced.py:player \
          --config.sampling.temperature=0 --config.evaluation.seeds=0,1,2,3,4 \
          --config.evaluation.questions=0 --budgets=4 --split=$split \
          --output=R/forced/$split
    done
    python -m research.memory.selection --chains=R/forced --output=R/read
    python -m research.memory.predictions --chains=R/read/forced \
        --output=R/predictions.json

CPU: the model is frozen and its decision alone is learned, in minutes:

    python -m research.memory.hidden --chains=R/read/forced \
        --policy=R/warm_start/policy --output=R/hidden
    python -m research.memory.decisions --chains=R/read/forced \
        --hidden=R/hidden --predictions=R/predictions.json --output=R/decisions
    python -m research.memory.results --chains=R/read/forced \
        --predictions=R/predictions.json --outcomes=R/decisions/outcomes.jsonl \
        --output=R/decisions

GPU: all weights, with real searches. The first command runs in pieces: it saves
when it is stopped, and the same command resumes. `:gpu` replaces `:cpu` above,
too. N is the number of questions of R/read/questions/memory_test.jsonl:

    anysearch prepare_data --folder=R/read/questions --sets=all --mix=memory \
        --output=R/read/prepared
    timeout --signal=TERM 570 python -m research.study --study=memory \
        --config=R/configuration.py --questions=N --budgets=1,2,3,4,5,6 \
        --seeds=5 --jobs=1 --threads=0 --output=R/study
    python -m research.memory.results --chains=R/read/forced \
        --predictions=R/predictions.json --outcomes=R/study/outcomes.jsonl \
        --output=R/study

where `R/configuration.py` is one file with the paths, which all rows share:

    from anysearch_jax import config
    from research.memory import configuration
    def get_config():
      return config.changed(
        configuration.get_config("gpu"), policy="R/warm_start/policy",
        data={"path": "R/read/prepared"}, retrieval={"index": "INDEX"})
"""
