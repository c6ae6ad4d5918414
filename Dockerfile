# Runs the demo: docker build -t commsweep . && docker run -v "$PWD/out:/work/out" commsweep
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends git g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /work
COPY . .
RUN make .venv/ready
CMD ["make", "demo"]
