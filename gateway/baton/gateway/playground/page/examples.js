// The texts of the Example buttons.

export const EXAMPLE_SCHEMA = {
  type: "object",
  properties: {
    title: { type: "string", maxLength: 60 },
    characters: { type: "array", items: { type: "string", maxLength: 20 }, maxItems: 3 },
    is_happy: { type: "boolean" },
  },
  required: ["title", "characters", "is_happy"],
  additionalProperties: false,
};

export const EXAMPLE_QUERY = "How can I sleep better?";

export const EXAMPLE_DOCUMENTS = [
  "Photosynthesis turns sunlight, water and carbon dioxide into sugar.",
  "Avoid coffee after noon, and keep the bedroom dark and cool at night.",
  "Tectonic plates stick, bend and suddenly slip along faults.",
  "Simmer lentils, carrots and cumin in vegetable stock for half an hour.",
  "Items with defects can be sent back within 30 days for a refund.",
];

export const EXAMPLE_TOOLS = [
  {
    name: "get_weather",
    description: "The weather of a city now.",
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 40 }, unit: { enum: ["celsius", "fahrenheit"] } },
      required: ["city", "unit"],
      additionalProperties: false,
    },
  },
];
