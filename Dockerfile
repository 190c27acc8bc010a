# memest with torch for CPUs, which is all that it needs; not built by the project's tests.
#   docker build -t memest . && docker run --rm -v "$PWD:/data" memest run train.py
FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY pyproject.toml README.md LICENSE constraints.txt /src/
COPY memest /src/memest
RUN pip install --no-cache-dir -c /src/constraints.txt --extra-index-url "$TORCH_INDEX" '/src[all]' \
 && rm -r /src
WORKDIR /data
ENTRYPOINT ["memest"]
CMD ["--help"]
